"""The words of the router whose edge a console asks."""

from tests.unit.router.conftest import tiny

__all__ = ["tiny"]
