"""The command that predicts one collective."""
