"""What clients meet: the OpenAI HTTP API and gRPC, and the checks of what they send."""
