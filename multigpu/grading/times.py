"""The class's simulated times, by pseudonym: a table that may be shown to the class.

Pseudonyms are made with the grading's secret. Keep secret.txt and feedback/index.csv to
yourself: with either, a pseudonym leads to a student. A student's page has that student's own
pseudonym and no other.
"""

import base64
import hmac
from collections.abc import Sequence

from multigpu.grading.csv_cells import number
from multigpu.grading.results import QuestionResult, Result

HEAD = ["question", "seconds", "pseudonym", "points", "out of"]


class Standing:
    """The times of a class.

    rows   the table: HEAD, then a question's times, the fastest first; HEAD alone without any
    best   each question's shortest time
    """

    def __init__(self, results: Sequence[Result], secret: str):
        self._key = secret.encode()
        timed = [
            (place, question.seconds, self.pseudonym(result.student), question)
            for result in results
            for place, question in enumerate(result.questions)
            if question.seconds is not None
        ]
        timed.sort(key=lambda row: row[:3])
        self.best = {question.name: seconds for _, seconds, _, question in reversed(timed)}
        self.rows = [HEAD] + [
            [
                question.name,
                f"{seconds:.6f}",
                name,
                number(question.earned),
                number(question.points),
            ]
            for _, seconds, name, question in timed
        ]

    def pseudonym(self, student: str) -> str:
        """Eight letters, the same in each run with this secret."""
        text = f"pseudonym of {student}".encode(errors="surrogatepass")
        letters = base64.b32encode(hmac.digest(self._key, text, "sha256")).decode()
        return f"{letters[:4]}-{letters[4:8]}"

    def text(self, student: str, question: QuestionResult) -> str:
        """What the student's page says of the time; "" without one."""
        if question.seconds is None:
            return ""
        return (
            f"Your time: {question.seconds:.4f} s, simulated. The best of the class: "
            f"{self.best[question.name]:.4f} s. In the class's table you are "
            f"{self.pseudonym(student)}."
        )
