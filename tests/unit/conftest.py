"""How long an example of a property takes is the machine's matter."""

import hypothesis

hypothesis.settings.register_profile("headrace", deadline=None)
hypothesis.settings.load_profile("headrace")
