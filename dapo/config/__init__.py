"""The options of a run: schema (what there is), loading (YAML and overrides), reference (the page made of them)."""

from dapo.config.schema import *  # noqa: F403
