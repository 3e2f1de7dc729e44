"""The Trainer's arguments with which it writes no files and prints nothing."""

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
