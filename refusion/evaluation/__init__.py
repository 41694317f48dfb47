"""Scores and honest speed."""
