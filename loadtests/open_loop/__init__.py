"""Open-loop load: requests go out when the traffic says, whether or not earlier ones were answered."""
