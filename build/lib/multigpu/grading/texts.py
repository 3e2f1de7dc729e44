"""Text that students control, in a form that can be shown anywhere."""

import re
import unicodedata

# Control characters but newline and tab, lone surrogates, non-characters, and the marks that
# change the direction of text ("Trojan Source", CVE-2021-42574). XML 1.0 forbids most of them.
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
# ECMA-48: ESC [ parameters final, as for colours, and the other sequences that begin with ESC.
TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def visible(text: str) -> str:
    """The text with each hidden character as its escape: \\x1b, \\u202e."""
    return HIDDEN.sub(_escape, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """A name on one line, in Unicode's form NFC (macOS writes accents separately)."""
    line = re.sub(r"[\t\n]", _escape, visible(text))
    return unicodedata.normalize("NFC", line).strip()


def without_colours(text: str) -> str:
    """What a terminal shows of the text, without colours and movements of the cursor."""
    return TERMINAL.sub("", text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
