"""Runs Octavo's own CPU kernels: C++ compiled once at install, reached by pointers, without torch's C++ interface."""
