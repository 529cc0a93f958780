"""The commands that measure this machine and learn from runs."""
