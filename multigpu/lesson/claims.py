"""Claims: what the textbooks say, and whether it held where the lesson measured it.

A claim is displayed in its cell. The cell's output also has it as metadata, from which
`multigpu notebooks claims` collects all claims.
"""

from multigpu.errors import UserError, wrapped

METADATA = "multigpu_claim"


class ClaimFails(UserError):
    """The condition of a claim is false in this run. A notebook shows the text only."""

    def _render_traceback_(self) -> list[str]:
        return wrapped(str(self))


def claim(says: str, *, holds: str, because: str, when: bool, guess: bool = False) -> None:
    """Display a result: what the textbooks say, whether it holds, and what was measured.

        lesson.claim(
            "Two GPUs are nearly twice as fast",
            holds="only for large batches",
            because=f"{large:.2f}× with 65,536 images, {small:.2f}× with 64 (simulated, V100)",
            when=large > 1.7 and small < 1,
        )

    `holds` is an answer: "yes", "no", "only for …". `because` has the figures, and what they
    depend on: the model, the number of ranks, the link; simulated, measured or published.
    With `guess`, `says` is what a learner may think, and no textbook says it.
    `when` is the condition that makes `holds` true. Raises ClaimFails if it is false: with
    other numbers than the lesson's, another answer can be right.
    """
    if not when:
        raise ClaimFails(
            f"“{says}”: with these numbers the lesson's answer, “{holds}”, is not right "
            f"({because}). Which cell did you change?"
        )
    source = "A guess" if guess else "Textbooks"
    plain = f"{source}: {says}.\nHere: {holds}: {because}."
    from IPython.core.getipython import get_ipython

    if get_ipython() is None:
        print(plain)
        return
    from IPython.display import display

    shown = f"**{source}:** {says}.\n\n**Here:** {holds}: {because}."
    data = {
        "says": f"{says} (a guess)" if guess else says,
        "holds": holds,
        "because": because,
    }
    display({"text/plain": plain, "text/markdown": shown}, raw=True, metadata={METADATA: data})
