"""Tokens: the words, strings and brackets of the IR's text, each with its line and column."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NoReturn

from fxsplit.errors import IRSyntaxError
from fxsplit.system.figures import show

Kind = Literal["name", "string", "word", "mark", "comment", "newline", "end"]

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+)
    | (?P<newline>\n)
    | (?P<comment>;[^\n]*)
    | (?P<name>%(?:[^\s;"(){}\[\]=,%:]+|"(?:[^"\\\n]|\\.)*"))   # a node: %relu, or %"any name"
    | (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<mark>[(){}\[\]=,:])
    | (?P<word>[^\s;"(){}\[\]=,%:]+(?::[^\s;"(){}\[\]=,%:]+)*)  # cpu:0 is one word
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Token:
    """A piece of the text: `begin` and `end` are its positions in the text.

    The last token of a text is an empty "end".
    """

    kind: Kind
    text: str
    begin: int
    end: int


class Tokens:
    """The tokens of a text, read from the first to the last.

    Inside round and square brackets, ends of lines and comments are skipped, so a list may take several lines.
    """

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self._at = 0
        self._open = 0
        self.depth = 0  # of the value that is being read: lists inside each other
        self._next = self._scan()

    @property
    def next(self) -> Token:
        """The token that `take` will return."""
        return self._next

    def take(self) -> Token:
        """Return the next token, and go past it."""
        token = self._next
        if token.text in ("(", "[") and token.kind == "mark":
            self._open += 1
        elif token.text in (")", "]") and token.kind == "mark":
            self._open -= 1
        self._next = self._scan()
        return token

    def accept(self, text: str) -> bool:
        """Go past the next token if it is the bracket, the sign or the word `text`; return whether it was."""
        if self._next.kind in ("mark", "word") and self._next.text == text:
            self.take()
            return True
        return False

    def expect(self, text: str, what: str) -> Token:
        """Go past the bracket, the sign or the word `text`.

        Raises IRSyntaxError for another token; `what` begins the message.
        """
        token = self._next
        if not self.accept(text):
            self.fail(f"{what} needs {text!r} here, and not {describe(token)}")
        return token

    def take_word(self, what: str) -> str:
        """Return the next word, or the content of the next string.

        Raises IRSyntaxError for another token; `what` needs the word.
        """
        token = self._next
        if token.kind not in ("word", "string"):
            self.fail(f"{what} must be a word or a string, and not {describe(token)}")
        self.take()
        return token.text if token.kind == "word" else self.unquote(token)

    def end_line(self, what: str) -> str:
        """Go past the end of the line, and return the comment before it without `;`.

        Raises IRSyntaxError for other tokens.
        """
        comment = self.take().text[1:].strip() if self._next.kind == "comment" else ""
        if self._next.kind == "end":
            return comment
        if self._next.kind != "newline":
            self.fail(f"{what} ends before {describe(self._next)}: put it on a line of its own")
        self.take()
        return comment

    def unquote(self, token: Token) -> str:
        """Return the content of a string or a quoted name; raises IRSyntaxError for an unknown escape."""
        import json

        try:
            return str(json.loads(token.text.removeprefix("%")))
        except ValueError as error:
            self.fail(f"{show(token.text)} is no string ({error}): escape characters as in JSON", token)

    def fail(self, what: str, token: Token | None = None) -> NoReturn:
        """Raise IRSyntaxError with the file, line and column of `token`, which by default is the next token."""
        at = (token or self._next).begin
        line = self.text.count("\n", 0, at) + 1
        column = at - (self.text.rfind("\n", 0, at) + 1) + 1
        raise IRSyntaxError(f"{self.file}:{line}:{column}: {what}")

    def _scan(self) -> Token:
        """Return the token at the current position, and go past it."""
        while True:
            found = _TOKEN.match(self.text, self._at)
            if found is None:
                return self._end_or_fail()
            self._at = found.end()
            kind = found.lastgroup
            if kind == "space" or (self._open and kind in ("newline", "comment")):
                continue
            return Token(kind, found[0], found.start(), found.end())  # type: ignore[arg-type]

    def _end_or_fail(self) -> Token:
        """Return the last token, "end". Raises IRSyntaxError if text remains: its first character begins no token."""
        rest = Token("end", "", self._at, self._at)
        if self._at < len(self.text):
            piece = self.text[self._at : self._at + 20].split("\n")[0]
            unclosed = piece.startswith(('"', '%"'))
            self.fail(
                f"{show(piece)} begins nothing: {'the string does not end on its line' * unclosed or 'quote it'}", rest
            )
        return rest


def describe(token: Token) -> str:
    """Return a token in words, for messages."""
    return {"end": "the end of the text", "newline": "the end of the line"}.get(token.kind) or show(token.text)
