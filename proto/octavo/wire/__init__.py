"""Defines the messages that the processes send each other over ZMQ, their codec, and the schemas that are served."""
