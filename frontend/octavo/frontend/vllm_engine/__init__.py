"""Serves gateways that speak vLLM's engine protocol over gRPC: token ids in, token ids out."""
