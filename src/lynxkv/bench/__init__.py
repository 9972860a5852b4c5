"""Compares schemes on one model and link."""
