"""Hooks into backward: autograd's, and users' communication hooks."""
