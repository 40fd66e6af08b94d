"""The base of every table of the configuration, and the types of values that fields take.

A value is taken as it is written: `true` is no number, `3.0` and `"3"` are no count, and nan and inf are refused.
"""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from hacpo_mega.models.files.documents import short
from hacpo_mega.models.files.hub import given_path, model_folder, model_name

Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
# No number of a run is larger: beyond it float32 overflows as soon as two of them meet.
Positive = Annotated[float, Field(strict=True, ge=1e-12, le=1e12)]
PositiveOrZero = Annotated[float, Field(strict=True, ge=0.0, le=1e12)]
Factor = Annotated[float, Field(strict=True, ge=0.0, le=1000.0)]
Small = Annotated[float, Field(strict=True, gt=0.0, le=1.0)]
Share = Annotated[float, Field(strict=True, ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(strict=True, ge=0.0, le=604_800.0)]  # a week
ShareBelowOne = Annotated[float, Field(strict=True, ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A frozen table of the configuration; a key that it does not know is an error, never ignored.

    The text under a field is its description: `hacpo-mega config` prints it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False, use_attribute_docstrings=True
    )


def _finite(value: Any) -> Any:
    """The value itself. ValueError for a nan or inf anywhere inside: no schema looks into a table that is passed on."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in inside:
        _finite(part)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"needs finite numbers, found {value}")
    return value


def _own_function(name: str) -> str:
    module, _, attribute = name.rpartition(":")
    if not module or not attribute.isidentifier() or not module.isprintable():
        raise ValueError(f"needs FILE.py:name or module:name, found {name!r}")
    return name


def one_of(words: str) -> WrapValidator:
    """Validator of a field with several types: one complaint, in these words, in place of one for each type."""

    def validated(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise ValueError(f"needs {words}, found {short(value)}") from error

    return WrapValidator(validated)


FlagOrAuto = Annotated[Flag | Literal["auto"], one_of("true, false or 'auto'")]
# Name of a function or class of the user's; user_code.py looks for it in the source.
OwnFunction = Annotated[str, AfterValidator(_own_function)]
PassedOn = Annotated[dict[str, Any], AfterValidator(_finite)]


def _openable(path: Path) -> Path:
    """The path, a leading ~ as the user's home.

    ValueError for one that no file system takes, or that no line can show: other code need not check paths again.
    """
    if "\0" in str(path) or len(os.fsencode(path)) > 4095 or any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise ValueError("needs a path of at most 4095 bytes, 255 in each part, without a zero character")
    if not str(path).isprintable():
        raise ValueError(f"needs a path without line ends and control characters, found {str(path)!r}")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"needs the name of a user after ~, found {str(path)!r}") from error


def _as_given(value: Any) -> Any:
    return given_path(value) if isinstance(value, str) and "\0" not in value else value


FilePath = Annotated[Path, AfterValidator(_openable)]
# A model of the Hub is its folder in the cache as long as a process lives, and name@COMMIT wherever it is written down.
ModelPath = Annotated[FilePath, BeforeValidator(_as_given), AfterValidator(model_folder), PlainSerializer(model_name)]
