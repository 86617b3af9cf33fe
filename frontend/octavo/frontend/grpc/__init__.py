"""Serves octavo.v1.GenerationService: the gRPC API."""
