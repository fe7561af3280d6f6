"""Mistral: Llama without biases; the first version windows its attention."""

from workers.models.config import Family, Traits, capped_to_window
from workers.models.fields import Fields


def traits(fields: Fields) -> Traits:
    return Traits()


FAMILY = Family("mistral", traits, capped_to_window)
