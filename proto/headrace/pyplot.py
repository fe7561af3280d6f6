"""matplotlib, for those who installed the `plots` extra."""

from typing import Any

from headrace.errors import ConfigError


def pyplot() -> Any:
    """matplotlib's, drawing to files alone; ConfigError when it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'headrace[plots]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
