"""The scripts, with the literals that make each one smaller. A module has those of a kind."""

from cases import centres, language, libraries, pytorch, vision

CASES = (
    *pytorch.CASES,
    *language.CASES,
    *centres.CASES,
    *vision.CASES,
    *libraries.CASES,
)
