"""Small modules and data for reports of errors and for tests."""
