"""The hand-off of a prompt's KV blocks: tickets, announcements, pulls, pins (design 2.4 to 2.6, 5.3)."""
