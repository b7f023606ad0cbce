"""The table of situations, by theme."""

import importlib

THEMES = (
    "modes",
    "rounds",
    "gradients",
    "zeroing",
    "differentiating",
    "hooks",
    "module_hooks",
    "sharing",
    "several_models",
    "buffers",
    "batch_norm",
    "freezing",
    "inside_forward",
    "unused",
    "outputs",
    "parameters",
    "wrapping",
    "changes",
    "communicating",
    "copies",
    "joining",
    "generative",
    "language",
    "meta_learning",
    "checkpointing",
    "precision",
    "optimizers",
)


def table(theme):
    """The rows of a theme."""
    return importlib.import_module(f"ranks.situations.{theme}").SITUATIONS


def about(theme):
    """What a theme is about, in a sentence."""
    return importlib.import_module(f"ranks.situations.{theme}").__doc__.strip()


def all_rows():
    """{name of the situation: (theme, row)} of the whole table."""
    return {row.name: (theme, row) for theme in THEMES for row in table(theme)}
