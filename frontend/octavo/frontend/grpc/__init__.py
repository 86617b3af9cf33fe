"""octavo.v1.GenerationService: the gRPC interface."""
