"""The front door and placement. No torch, and no knowledge of engines."""
