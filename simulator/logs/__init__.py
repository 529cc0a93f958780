"""Logs of other trainers as evidence: what a log states becomes a ``TrainerLog``, what it does not state stays None."""
