"""Converts grammars from EBNF, as in GBNF and xgrammar, to Lark, which the engine accepts."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)|(?P<define>::=)|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<class>\[(?:[^\]\\]|\\.)*\])"""
    r"""|(?P<token>Token\([ \t]*[0-9]+[ \t]*\))|(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)"""
    r"""|(?P<repeat>[*+?]|\{[ \t]*[0-9]+[ \t]*(?:,[ \t]*[0-9]*[ \t]*)?\})|(?P<mark>[()|.])""",
    re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|u\{([0-9A-Fa-f]{1,6})\}|(.))|(.)", re.DOTALL
)
_REFERENCE = re.compile("\0([^\0]*)\0")
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_CLASSES = "dwsDWS"
_MAX_DEPTH = 64  # nesting levels of brackets, and of terminals within terminals


class EbnfError(ValueError):
    """The grammar is not valid. The text names the problem and its place."""


def is_lark(text: str) -> bool:
    """Whether a grammar is in Lark: such a grammar has no ::= outside of strings and comments."""
    return not re.search(r'(?m)^[^"#/\n]*::=', text)


def to_lark(text: str) -> str:
    """Convert a grammar from EBNF to Lark. Raises EbnfError if the grammar is not valid."""
    return _Parser(text).grammar()


@dataclass
class _Rule:
    name: str
    body: str = ""
    uses: list[str] = field(default_factory=list)  # rules that this rule refers to
    is_terminal: bool = True  # the rule can be one regular expression, so it contains no token
    depth: int = 0


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._items = [*self._scan(), ("end", "", len(text))]
        self._at = 0
        self._rules: dict[str, _Rule] = {}
        self._rule = _Rule("")

    def _scan(self) -> Iterator[tuple[str, str, int]]:
        at = 0
        while at < len(self._text):
            found = _TOKEN.match(self._text, at)
            if not found or not found.lastgroup:
                raise self._error(f"{self._text[at : at + 10]!r} is not understood", at)
            if found.lastgroup != "space":
                yield found.lastgroup, found.group(), at
            at = found.end()

    def _error(self, problem: str, at: int) -> EbnfError:
        line = self._text.count("\n", 0, at) + 1
        column = at - (self._text.rfind("\n", 0, at) + 1) + 1
        return EbnfError(f"{problem}, at line {line}, column {column}")

    @property
    def _next(self) -> tuple[str, str, int]:
        return self._items[self._at]

    def grammar(self) -> str:
        while self._next[0] != "end":
            kind, name, at = self._next
            if kind != "name" or not self._defines(self._at):
                raise self._error('a rule is expected, such as root ::= "a" | "b"', at)
            if name in self._rules:
                raise self._error(f"the rule {name} is defined twice", at)
            self._at += 2
            self._rule = self._rules[name] = _Rule(name)
            self._rule.body = self._alternatives(0)
        if "root" not in self._rules:
            raise EbnfError("there is no rule root")
        self._find_terminals()
        names = {rule.name: f"{'T' if rule.is_terminal else 'r'}{i}" for i, rule in enumerate(self._rules.values())}
        lines = [f"start: {names['root']}"]
        for rule in self._rules.values():
            body = _REFERENCE.sub(lambda found: names[found.group(1)], rule.body)
            lines.append(f"{names[rule.name]}: {body}")
        return "\n".join(lines) + "\n"

    def _defines(self, at: int) -> bool:
        return self._items[at][0] == "name" and self._items[at + 1][0] == "define"

    def _alternatives(self, depth: int) -> str:
        """Convert alternatives. Names of rules stand between two NUL characters until it is known which rules are
        terminals."""
        options = [self._sequence(depth)]
        while self._next[1] == "|":
            self._at += 1
            options.append(self._sequence(depth))
        return " | ".join(options)

    def _sequence(self, depth: int) -> str:
        parts: list[str] = []
        while True:
            kind, text, at = self._next
            if kind == "end" or (kind == "mark" and text in "|)") or self._defines(self._at):
                return " ".join(parts) or '""'
            self._at += 1
            part = self._part(kind, text, at, depth)
            while self._next[0] == "repeat":
                repeat = re.sub(r"\s", "", self._next[1])
                part = f"({part}){repeat}" if part[-1] in "*+?}" else f"{part}{repeat}"
                self._at += 1
            parts.append(part)

    def _part(self, kind: str, text: str, at: int, depth: int) -> str:
        if kind == "text":
            return json.dumps("".join(char for char, _ in self._characters(text[1:-1], at + 1)), ensure_ascii=False)
        if kind == "class":
            return self._class(text, at)
        if kind == "token":
            self._rule.is_terminal = False
            return f"<[{int(text[6:-1])}]>"
        if kind == "name":
            self._rule.uses.append(text)
            return f"\0{text}\0"
        if text == ".":
            return "/(?s:.)/"
        if text != "(":
            raise self._error(f"{text} is not expected", at)
        if depth == _MAX_DEPTH:
            raise self._error(f"brackets are nested more than {_MAX_DEPTH} deep", at)
        inner = self._alternatives(depth + 1)
        if self._next[1] != ")":
            raise self._error("a bracket is not closed", at)
        self._at += 1
        return f"({inner})"

    def _characters(self, text: str, at: int) -> Iterator[tuple[str, bool]]:
        """Yield each character, and whether it was escaped. The escape of a character class, such as \\d, stays two
        characters."""
        for found in _ESCAPE.finditer(text):
            code = next((code for code in found.groups()[:4] if code), None)
            char = chr(int(code, 16)) if code and int(code, 16) <= 0x10FFFF else None
            if code and (char is None or "\ud800" <= char <= "\udfff"):
                raise self._error(f"{found.group()} is not the number of a character", at + found.start())
            escaped = found.group(5)
            if escaped and escaped.isalnum():
                char = f"\\{escaped}" if escaped in _CLASSES else _CONTROLS.get(escaped)
                if char is None:
                    raise self._error(f"the escape {found.group()} is not known", at + found.start())
            yield char or escaped or found.group(), found.group(6) is None

    def _class(self, text: str, at: int) -> str:
        negated = text.startswith("[^")
        out = ""
        for char, escaped in self._characters(text[2 if negated else 1 : -1], at + 1):
            out += char if len(char) == 2 else "-" if char == "-" and not escaped else f"\\x{{{ord(char):x}}}"
        if not out:
            raise self._error("an empty class", at)
        # A minus sign at the beginning or the end is a character, not a range.
        out = re.sub(r"^-|-$", r"\\x{2d}", out)
        return f"/[{'^' if negated else ''}{out}]/"

    def _find_terminals(self) -> None:
        """Determine which rules are terminals. A rule is a terminal if all rules that it refers to are terminals. Rules
        that refer to themselves are not terminals."""
        users: dict[str, list[_Rule]] = {name: [] for name in self._rules}
        waits = {}
        for rule in self._rules.values():
            waits[rule.name] = len(rule.uses)
            for used in rule.uses:
                if used not in self._rules:
                    raise EbnfError(f"the rule {rule.name} refers to {used}, which is not defined")
                users[used].append(rule)
        ready = deque(rule for rule in self._rules.values() if not rule.uses)
        seen = set()
        while ready:
            rule = ready.popleft()
            seen.add(rule.name)
            rule.is_terminal &= rule.depth < _MAX_DEPTH
            for user in users[rule.name]:
                user.is_terminal &= rule.is_terminal
                user.depth = max(user.depth, rule.depth + 1)
                waits[user.name] -= 1
                if waits[user.name] == 0:
                    ready.append(user)
        for rule in self._rules.values():
            rule.is_terminal &= rule.name in seen
