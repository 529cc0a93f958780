"""A plan as files that others run: scheduler scripts, and the settings of other trainers."""
