"""Pickles that make a file when Python's own unpickler reads them, put together opcode by opcode."""

import io
import os
import struct
from pathlib import Path
from typing import Any

import torch

METADATA = "torch.distributed.checkpoint.metadata"


def whole(value: bytes) -> bytes:
    return b"\x80\x04" + value + b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def raw(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def table(**entries: bytes) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in entries.items()) + b"u"


def made(module: str, attribute: str, state: bytes) -> bytes:
    """An object of a class, without arguments, in this state."""
    return name(module, attribute) + b")\x81" + state + b"b"


class Calls:
    """Is pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple:
        return self._call


def torch_saved(thing: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def touching(file: Path) -> dict[str, bytes]:
    """By what they use, pickles that make `file`."""
    command, code = f"touch {file}", text(f"open({str(file)!r}, 'w')")
    shell, system = text(command), name("os", "system")
    imported = call(name("importlib", "import_module"), text("os"))
    run = call(system, shell)
    old = f"S'{command}'\n".encode()
    values = {
        "os.system": run,
        "posix.system": call(name("posix", "system"), shell),
        "a listed module's os.system": call(name("torch.serialization", "os.system"), shell),
        "builtins.exec": call(name("builtins", "exec"), code),
        "builtins.eval": call(name("builtins", "eval"), code),
        "builtins.getattr": call(call(name("builtins", "getattr"), imported, text("system")), shell),
        "operator.attrgetter": call(call(call(name("operator", "attrgetter"), text("system")), imported), shell),
        "operator.methodcaller": call(
            call(name("operator", "methodcaller"), text("touch")), call(name("pathlib", "PosixPath"), text(str(file)))
        ),
        "functools.partial": call(call(name("functools", "partial"), system, shell)),
        "subprocess": call(name("subprocess", "check_output"), b"](" + text("touch") + text(str(file)) + b"e"),
        "torch.storage._load_from_bytes": call(
            name("torch.storage", "_load_from_bytes"), raw(torch_saved(Calls(os.system, command)))
        ),
        "torch._utils, of another storage": call(
            name("torch._utils", "_rebuild_tensor_v2"), run, b"K\x00", b")", b")", b"\x89", b"}"
        ),
        "numpy.testing": call(name("numpy.testing._private.utils", "runstring"), code, b"}"),
        "the oldest opcodes": b"cposix\nsystem\n(" + old + b"tR",
        "INST": b"(" + old + b"iposix\nsystem\n",
        "OBJ": b"(cposix\nsystem\n" + old + b"o",
        "the memo": system + b"q\x070h\x07(" + shell + b"tR",
        "a duplicate": system + b"20(" + shell + b"tR",
        "what is dropped": run + b"0N",
        "the arguments of a listed class": call(name("torch", "Size"), b"]" + run + b"a"),
        "the state of a listed class": made(METADATA, "Metadata", table(state_dict_metadata=table(a=run))),
        "a key": b"}" + run + b"K\x01s",
    }
    return {way: whole(value) for way, value in values.items()}


def broken() -> dict[str, bytes]:
    """By what is wrong: pickles that change classes, exhaust a reader, or are none."""
    listed = name(METADATA, "Metadata")
    return {
        "sets an attribute of a class": whole(listed + b"N" + table(hacked=b"K\x01") + b"\x86b"),
        "sets the dictionary of a class": whole(listed + table(hacked=b"K\x01") + b"b"),
        "sets a state twice": whole(made(METADATA, "Metadata", table(a=b"N")) + table(b=b"N") + b"b"),
        "calls what it has called": whole(call(call(listed))),
        "calls a text": whole(call(text("print"))),
        "names by what is no text": whole(b")" + b"\x85" * 200_000 + text("x") + b"\x93"),
        "hashes a key of any depth": whole(b"})" + b"\x85" * 200_000 + b"Ns"),
        "nests lists of any depth": whole(b"]" * 200_000 + b"a" * 199_999 + b"0"),
        "asks for more bytes than there are": whole(b"\x8e" + struct.pack("<Q", 1 << 62) + b"x"),
        "takes from an empty memo": whole(b"h\x00"),
        "takes from an empty stack": whole(b"0N"),
        "closes a mark that is not open": whole(b"t"),
        "leaves a mark open": whole(b"(N"),
        "is an extension": whole(b"\x82\x01"),
        "is a persistent id": whole(b"Pabc\n"),
        "has a buffer beside it": whole(b"\x97"),
        "is a set": whole(b"\x8f"),
        "has more behind it": whole(b"N") + b"N.",
        "is cut": whole(b"K")[:-1],
        "is empty": b"",
        "is text": b"hello, world\n" * 3,
        "has terminal codes in a name": whole(name("os\x1b[2J", "system\r")),
    }
