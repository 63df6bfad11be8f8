"""The commands of `dapo`, one function each; `dapo.cli` puts them together."""
