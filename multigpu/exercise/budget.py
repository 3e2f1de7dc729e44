"""How long students' code may run."""

SECONDS = 20.0  # for a check, unless its exercise says another number
QUESTION_CHECKS = 2  # a question has the time of two checks
SUBMISSION_CHECKS = 6  # a submission has the time of six
