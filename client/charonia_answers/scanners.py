"""Scanners for the arguments of a call, in pieces of any size: JSON, Gemma's variant of JSON, and Python literals.

A scanner starts at the beginning of one value. `feed(text, at)` scans from text[at]. It returns the index of the first
character that it did not scan, and the scanned text as JSON. `done`: the value ends before this index. `broken`: the
character at this index is not allowed. If neither is set, the scanner needs more text: the next call must repeat the
unscanned text, with more text after it. Time is linear in the length of the text. Memory is linear in the nesting
depth, which is bounded. The joined results do not depend on how the text was split.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Protocol

# generated: request limits, from definitions/ by `make generate`
# nesting levels of JSON, because recursive functions need Python's stack for each level; the gateway has the same limit
MAX_DEPTH = 200
# end of generated: request limits
MAX_WORD = 256  # characters of a word, and of a number that is scanned as a whole

# Surrogates stand for special tokens, which no argument contains.
_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
JSON_VALUE = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_JSON_WORD = re.compile(r"[-+.0-9A-Za-z]+")
# Parts of a long number, and the beginning of a number in which each run of digits is one digit.
_NUMBER_PART = re.compile(r"[0-9]+|[-+.eE]")
_NUMBER_BEGUN = re.compile(r"-?([0-9](\.|(\.[0-9])?([eE][+-]?[0-9]?)?)?)?")


class Scanner(Protocol):
    done: bool
    broken: bool

    def feed(self, text: str, at: int) -> tuple[int, str]: ...


class _Scanner:
    """The states of all scanners: the nesting, and words without quotes. Methods with `at` return the index after the
    text that they scanned, or `at` if they need more text. A number of more than MAX_WORD characters is returned in
    pieces."""

    _words: re.Pattern[str]  # part of a word
    _separators = (",", ":")
    _trailing_comma = ""  # " or close" if a comma may precede a closing bracket
    _keeps_space = False  # white space between values is part of the result

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._stack: list[str] = []  # expected closing brackets
        self._expects = "value"  # or: value or close, key, key or close, colon, more, string
        self._is_key = False
        self._comma = ""  # stands before the next value
        self._word = ""  # a begun word
        self._number = ""  # a begun long number, in which each run of digits is one digit

    def feed(self, text: str, at: int) -> tuple[int, str]:
        out: list[str] = []
        while at < len(text) and not self.done and not self.broken:
            expects = self._expects
            end = (self._in_string if expects == "string" else self._between)(text, at, out)
            if end == at and self._expects == expects:
                break
            at = end
        return at, "".join(out)

    def _in_string(self, text: str, at: int, out: list[str]) -> int:
        raise NotImplementedError

    def _begin(self, text: str, at: int, out: list[str]) -> int:
        """Scan the beginning of a value or a key."""
        raise NotImplementedError

    def _spell(self, word: str) -> str:
        """Convert a word to JSON. Returns "" for a word that is not allowed."""
        return ""

    def _between(self, text: str, at: int, out: list[str]) -> int:
        char, expects = text[at], self._expects
        if self._word:
            return self._in_word(text, at, out)
        if self._number:
            return self._in_number(text, at, out)
        if space := _SPACE.match(text, at):
            out.append(space.group() if self._keeps_space else "")
            return space.end()
        if expects == "more" or (expects.endswith("or close") and char == self._stack[-1]):
            return self._after_value(char, at, out)
        if expects == "colon":
            self.broken = char != ":"
            out.append("" if self.broken else self._separators[1])
            self._expects = "value"
            return at + (not self.broken)
        self._is_key = expects.startswith("key")
        return self._begin(text, at, out)

    def _after_value(self, char: str, at: int, out: list[str]) -> int:
        if char == self._stack[-1]:
            out.append("]" if self._stack.pop() != "}" else "}")
            self._comma = ""
            self._ended()
        else:
            self.broken = char != ","
            if self._trailing_comma:
                self._comma = self._separators[0]
            else:
                out.append("" if self.broken else self._separators[0])
            self._expects = ("key" if self._stack[-1] == "}" else "value") + self._trailing_comma
        return at + (not self.broken)

    def _open(self, char: str, at: int, out: list[str]) -> int:
        self._stack.append({"[": "]", "(": ")", "{": "}"}[char])
        self.broken = len(self._stack) > MAX_DEPTH
        self._give(out, "" if self.broken else "{" if char == "{" else "[")
        self._expects = "key or close" if char == "{" else "value or close"
        return at + (not self.broken)

    def _begin_string(self, quote: str, at: int, out: list[str]) -> int:
        self._expects = "string"
        self._give(out, '"')
        return at + len(quote)

    def _end_string(self, out: list[str]) -> None:
        out.append('"')
        self._ended()

    def _in_word(self, text: str, at: int, out: list[str]) -> int:
        if found := self._words.match(text, at):
            end = min(found.end(), at + MAX_WORD - len(self._word))
            self._word += text[at:end]
            if end > at:
                return end
            begun, self._word = self._word, ""
            self._begin_number(begun, out)
            return at if self.broken else self._in_number(text, at, out)
        shown = self._spell(self._word)
        self.broken = not shown
        if shown:
            self._give(out, shown)
            self._word = ""
            self._ended()
        return at

    def _begin_number(self, begun: str, out: list[str]) -> None:
        """Return the first characters of a long number. Another long word is not allowed."""
        number = re.sub("[0-9]+", "1", begun)
        self.broken = self._is_key or re.match("-?0[0-9]", begun) is not None or not _NUMBER_BEGUN.fullmatch(number)
        if not self.broken:
            self._number = number
            self._give(out, begun)

    def _in_number(self, text: str, at: int, out: list[str]) -> int:
        part = _NUMBER_PART.match(text, at)
        if part is None:
            self.broken = JSON_VALUE.fullmatch(self._number) is None
            self._number = ""
            self._ended()
            return at
        is_same_run = self._number[-1].isdigit() and part.group()[0].isdigit()
        number = self._number if is_same_run else self._number + part.group()[0]
        self.broken = not _NUMBER_BEGUN.fullmatch(number)
        if self.broken:
            return at
        self._number = number
        out.append(part.group())
        return part.end()

    def _give(self, out: list[str], shown: str) -> None:
        out.append(self._comma + shown)
        self._comma = ""

    def _ended(self) -> None:
        """Update the state after the end of a value or a key."""
        self._expects = "colon" if self._is_key else "more"
        self.done = not self._stack
        self._is_key = False


class JsonScanner(_Scanner):
    """Scans one JSON value, and returns it as it was written. JSON allows control characters within strings only as
    escapes, but models write them without. The scanner converts them to escapes."""

    _keeps_space = True

    def _in_string(self, text: str, at: int, out: list[str]) -> int:
        if plain := _PLAIN.match(text, at):
            out.append(plain.group())
            return plain.end()
        char = text[at]
        if char == '"':
            self._end_string(out)
        elif char < " ":
            out.append(json.dumps(char)[1:-1])
        elif escape := _ESCAPE.match(text, at):
            out.append(escape.group())
            return escape.end()
        else:
            self.broken = not _ESCAPE_BEGUN.fullmatch(text, at)
            return at
        return at + 1

    def _begin(self, text: str, at: int, out: list[str]) -> int:
        if text[at] == '"':
            return self._begin_string('"', at, out)
        if text[at] in "{[" and not self._is_key:
            return self._open(text[at], at, out)
        word = _JSON_WORD.match(text, at)
        if word and len(word.group()) > MAX_WORD:
            self._begin_number(text[at : at + MAX_WORD], out)
            return at if self.broken else at + MAX_WORD
        if word and word.end() == len(text):
            return at  # it may go on
        value = None if self._is_key else JSON_VALUE.match(text, at)
        self.broken = value is None
        if value is None or self.broken:
            return at
        out.append(value.group())
        self._ended()
        return value.end()


GEMMA_WORD = re.compile(r"[^:,{}\[\]\s\"<\ud800-\udfff]+")


class GemmaScanner(_Scanner):
    """Scans an object as Gemma writes it: keys with or without quotes, strings between two `quote` and without
    escapes."""

    _words = GEMMA_WORD

    def __init__(self, quote: str) -> None:
        super().__init__()
        self._quote = quote
        self._plain = re.compile(rf"[^{re.escape(quote[0])}\ud800-\udfff]+")

    def _in_string(self, text: str, at: int, out: list[str]) -> int:
        if text.startswith(self._quote, at):
            self._end_string(out)
            return at + len(self._quote)
        if self._begins_quote(text, at):
            return at
        if "\ud800" <= text[at] <= "\udfff":
            self.broken = True
            return at
        plain = self._plain.match(text, at)
        end = plain.end() if plain else at + 1
        out.append(json.dumps(text[at:end], ensure_ascii=False)[1:-1])
        return end

    def _begins_quote(self, text: str, at: int) -> bool:
        """Whether the rest of the text may be the beginning of a quote."""
        return self._quote.startswith(text[at : at + len(self._quote)])

    def _begin(self, text: str, at: int, out: list[str]) -> int:
        if text.startswith(self._quote, at):
            return self._begin_string(self._quote, at, out)
        if self._begins_quote(text, at):
            return at
        if text[at] in "{[" and not self._is_key:
            return self._open(text[at], at, out)
        self.broken = not GEMMA_WORD.match(text[at])
        return at if self.broken else self._in_word(text, at, out)

    def _spell(self, word: str) -> str:
        if self._is_key:
            return json.dumps(word, ensure_ascii=False)
        return word if JSON_VALUE.fullmatch(word) else ""


PYTHON_WORD = re.compile(r"[0-9A-Za-z_+.\-]+")
_PYTHON_NUMBER = re.compile(r"([+-]?)([0-9_]*)(\.[0-9_]*)?([eE][+-]?[0-9]+)?")
_PYTHON_WORDS = {"None": "null", **{word: word.lower() for word in ("True", "False", "true", "false", "null")}}
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
_ESCAPES |= {char: char for char in "\"'\\/"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile("[0-9a-fA-F]+")
_MAX_PYTHON_SPACE = 64  # characters of white space after a quote that are examined


class PythonScanner(_Scanner):
    """Scans one Python literal: string, number, True, False, None, list, tuple, or dictionary. true, false and null are
    also accepted. Models forget to escape quotes. So a quote ends a string only if a comma, a colon or a closing
    bracket comes next. Tuples become lists, and the keys of dictionaries become strings."""

    _words = PYTHON_WORD
    _separators = (", ", ": ")
    _trailing_comma = " or close"
    _quote = ""  # quote of the current string

    def _in_string(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        if char == "\\":
            return self._escape(text, at, out)
        if char == self._quote[0]:
            return self._at_quote(text, at, out)
        plain = _PYTHON_PLAIN[self._quote[0]].match(text, at)
        if not plain:
            self.broken = True
            return at
        out.append(json.dumps(plain.group(), ensure_ascii=False)[1:-1])
        return plain.end()

    def _at_quote(self, text: str, at: int, out: list[str]) -> int:
        """Scan a quote within a string: the quote ends the string or is part of it."""
        quote = self._quote
        if len(quote) == 3:
            if len(text) - at < 3:
                return at if quote.startswith(text[at:]) else self._part(text, at, out)
            # If more than three quotes follow each other, the last three end the string.
            if not text.startswith(quote, at) or text.startswith(quote, at + 1):
                return self._part(text, at, out)
            if len(text) - at == 3:
                return at
            self._end_string(out)
            return at + 3
        after = at + 1
        while after < len(text) and after - at <= _MAX_PYTHON_SPACE and text[after] in " \t\r\n":
            after += 1
        if after == len(text):
            return at
        if text[after] not in " \t\r\n,)]}:":
            return self._part(text, at, out)
        self._end_string(out)
        return at + 1

    def _part(self, text: str, at: int, out: list[str]) -> int:
        out.append(json.dumps(text[at])[1:-1])
        return at + 1

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        if len(text) - at < 2:
            return at
        char = text[at + 1]
        digits = _HEX_DIGITS.get(char)
        if digits:
            found = _HEX.match(text[at + 2 : at + 2 + digits])
            size = len(found.group()) if found else 0
            if size < digits:
                self.broken = len(text) - at - 2 > size
                return at
            code = int(text[at + 2 : at + 2 + digits], 16)
            self.broken = code > sys.maxunicode
            # In JSON, two escaped surrogates are one character. A single surrogate stays as the model wrote it.
            if not self.broken:
                out.append(json.dumps(chr(code), ensure_ascii=0xD800 <= code <= 0xDFFF)[1:-1])
            return at + 2 + digits
        if "\ud800" <= char <= "\udfff":
            self.broken = True
            return at
        out.append(json.dumps(_ESCAPES.get(char, "\\" + char), ensure_ascii=False)[1:-1])
        return at + 2

    def _begin(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        if char in "'\"":
            if len(text) - at < 3 and text[at:] == char * (len(text) - at):
                return at  # these may be three quotes, or an empty string
            self._quote = char * 3 if text.startswith(char * 3, at) else char
            return self._begin_string(self._quote, at, out)
        if char in "[({" and not self._is_key:
            return self._open(char, at, out)
        self.broken = not PYTHON_WORD.match(char)
        return at if self.broken else self._in_word(text, at, out)

    def _spell(self, word: str) -> str:
        shown = _python_word(word)
        return f'"{shown}"' if shown and self._is_key else shown


_PYTHON_PLAIN = {quote: re.compile(rf"[^\\{quote}\ud800-\udfff]+") for quote in "'\""}


def _python_word(word: str) -> str:
    """Convert a word or a number to JSON. Returns "" for any other word."""
    if word in _PYTHON_WORDS:
        return _PYTHON_WORDS[word]
    found = _PYTHON_NUMBER.fullmatch(word)
    if not found:
        return ""
    sign, whole, part, exponent = found.group(1), found.group(2), found.group(3) or "", found.group(4) or ""
    whole, part = whole.replace("_", ""), part.replace("_", "").rstrip(".")
    if not whole and not part:
        return ""
    return f"{sign.strip('+')}{whole.lstrip('0') or '0'}{part}{exponent}"
