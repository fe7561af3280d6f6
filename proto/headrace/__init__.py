"""The protocol: what every process of a Headrace cluster must agree on."""
