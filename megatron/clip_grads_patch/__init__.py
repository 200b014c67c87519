"""The command that puts the revised clip_grads.py in place; training never imports it."""

__version__ = "0.1.0"
