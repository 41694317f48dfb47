"""Conversations from files and generators: what training learns from and evaluation asks."""
