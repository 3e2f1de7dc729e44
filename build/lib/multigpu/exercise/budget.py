"""How long students' code may run."""

SECONDS = 20.0  # for a check, unless its exercise says another number
QUESTION_CHECKS = 3  # a question has the time of three checks
SUBMISSION_CHECKS = 12  # a submission has the time of twelve
