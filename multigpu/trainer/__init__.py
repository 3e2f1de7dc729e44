"""What is a Trainer? The loop of the lessons, written once: a small one whose names are Lightning's."""
