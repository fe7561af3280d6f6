"""Mistral: Llama without biases; the first version windows its attention."""

from workers.models.config import Family, ServedContext, Traits, capped_to_window
from workers.models.fields import Fields

FIRST_WINDOW = 4096


def traits(fields: Fields) -> Traits:
    return Traits()


def context(fields: Fields, tokens: int) -> ServedContext:
    """A configuration that does not name a window means the first version's; one that says null has none."""
    if "sliding_window" not in fields.values:
        fields = Fields(fields.path, {**fields.values, "sliding_window": FIRST_WINDOW}, fields.prefix)
    return capped_to_window(fields, tokens)


FAMILY = Family("mistral", traits, context)
