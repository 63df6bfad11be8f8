"""The cost of a run before it starts: on this machine (`plan_text`), and on N GPUs of one model (`estimate`)."""

from dapo.plan.dry_run import plan_text

__all__ = ["plan_text"]
