"""Reinforcement learning of language models from verifiable rewards with DAPO."""
