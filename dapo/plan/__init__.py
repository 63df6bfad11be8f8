"""What a run will take, before it runs: on this machine (`plan_text`), and on N GPUs of a kind (`estimate`)."""

from dapo.plan.dry_run import plan_text

__all__ = ["plan_text"]
