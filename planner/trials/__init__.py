"""Right-sizing on the command line: what ``headway plan --calibrate`` does."""
