"""Pickled bytes read as plain values: nothing that they name is imported, called, constructed or changed.

torch pickles the index of a checkpoint, and what torch's, Megatron's and vLLM's object collectives say to peers. Python
reads a pickle by calling whatever it names, with whatever arguments. Here it is put together from numbers, texts,
bytes, lists, tuples and dictionaries; what it would have called becomes a `Record` of the name, the arguments and the
state, if the caller has listed that name. The reader of a Record decides its meaning, key by key.

A list of harmless classes given to Python's own unpickler would not do: a pickle can set attributes of classes, too.
Elsewhere: what the files and the peers say (stored_index.py in megatron/, patches.py).
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Name = tuple[str, str]
Names = frozenset[Name]

NO_NAMES: Names = frozenset()
KEYS = (str, int, float, bytes)


@dataclass(eq=False)
class Record:
    """A pickled object left unmade: its class or function, the arguments, and its state if it had one.

    Equal to itself alone, so that it can be the key of a dictionary. `is_made` is false for the class itself.
    """

    name: Name
    arguments: tuple[Any, ...] = ()
    state: Any = None
    is_made: bool = True


def as_is(record: Record) -> Any:
    """The record itself."""
    return record


def read_plain(data: bytes, names: Names = NO_NAMES, meaning: Callable[[Record], Any] = as_is) -> Any:
    """The value of a pickle that names nothing but `names`, as pairs (module, name).

    `meaning` gives the value that replaces a Record, at the moment at which it would have been made. ValueError, in a
    few words, for any other name, for opcodes that no plain value needs, and for bytes that are no pickle.
    """
    reader = _Reader(names, meaning)
    try:
        for opcode, argument, position in pickletools.genops(data):
            step = _STEPS.get(opcode.name)
            if step is None:
                raise ValueError(f"it is no plain value: {opcode.name} at byte {position}")
            step(reader, argument)
    except (IndexError, KeyError, TypeError, OverflowError, AssertionError, MemoryError) as error:
        raise ValueError(f"it is no whole pickle: {type(error).__name__}") from error
    if len(reader.stack) != 1 or reader.outer or position + 1 != len(data):
        raise ValueError("it is no whole pickle")
    return reader.stack[0]


class _Reader:
    """Python's unpickling machine, less everything that reaches outside it."""

    def __init__(self, names: Names, meaning: Callable[[Record], Any]) -> None:
        self.names, self.meaning = names, meaning
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # the stacks below each open mark
        self.memo: dict[int, Any] = {}

    def nothing(self, _: Any) -> None:
        """For what only frames a pickle."""

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self, _: Any) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def put(self, index: int) -> None:
        self.memo[int(index)] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self.memo[int(index)])

    def tuple_of(self, number: int) -> None:
        items = self.stack[-number:]
        if len(items) != number:
            raise IndexError
        self.stack[-number:] = [tuple(items)]

    def tuple_since_mark(self, _: Any) -> None:
        self.push(tuple(self.since_mark()))

    def append(self, _: Any) -> None:
        item = self.stack.pop()
        self._top(list).append(item)

    def extend(self, _: Any) -> None:
        items = self.since_mark()
        self._top(list).extend(items)

    def set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(self._top(dict), key, value)

    def set_items(self, _: Any) -> None:
        items = self.since_mark()
        table = self._top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(table, key, value)

    def name_in_text(self, both: str) -> None:
        module, _, name = both.partition(" ")
        self._name(module, name)

    def name_on_stack(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._name(module, name)

    def make(self, _: Any) -> None:
        arguments, what = self.stack.pop(), self.stack.pop()
        if type(what) is not Record or what.is_made or type(arguments) is not tuple:
            raise ValueError("it calls what is no class")
        self.push(self.meaning(Record(what.name, arguments)))

    def build(self, _: Any) -> None:
        state = self.stack.pop()
        record = self._top(Record)
        if not record.is_made or record.state is not None:
            raise ValueError(f"it changes {'.'.join(record.name)}")
        record.state = state

    def _name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise TypeError
        if (module, name) not in self.names:
            raise ValueError(f"it names {module[:80]}.{name[:80]}".encode("unicode_escape").decode())
        self.push(Record((module, name), is_made=False))

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise TypeError
        return self.stack[-1]

    def _set(self, table: dict, key: Any, value: Any) -> None:
        # A tuple would be hashed through all that is in it, however deep that is.
        if type(key) not in KEYS and not (type(key) is Record and key.is_made):
            raise TypeError
        table[key] = value


def _constant(make: Callable[[], Any]) -> Callable[[_Reader, Any], None]:
    return lambda reader, _: reader.push(make())


_PUSHED = (
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
)
# The action of each opcode; any other opcode is refused.
_STEPS: dict[str, Callable[[_Reader, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), _Reader.nothing),
    **dict.fromkeys(_PUSHED, _Reader.push),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Reader.get),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Reader.put),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Reader.make),
    "NONE": _constant(lambda: None),
    "NEWTRUE": _constant(lambda: True),
    "NEWFALSE": _constant(lambda: False),
    "EMPTY_LIST": _constant(list),
    "EMPTY_DICT": _constant(dict),
    "EMPTY_TUPLE": _constant(tuple),
    "TUPLE1": lambda reader, _: reader.tuple_of(1),
    "TUPLE2": lambda reader, _: reader.tuple_of(2),
    "TUPLE3": lambda reader, _: reader.tuple_of(3),
    "TUPLE": _Reader.tuple_since_mark,
    "APPEND": _Reader.append,
    "APPENDS": _Reader.extend,
    "SETITEM": _Reader.set_item,
    "SETITEMS": _Reader.set_items,
    "MARK": _Reader.mark,
    "MEMOIZE": _Reader.memoize,
    "GLOBAL": _Reader.name_in_text,
    "STACK_GLOBAL": _Reader.name_on_stack,
    "BUILD": _Reader.build,
}
