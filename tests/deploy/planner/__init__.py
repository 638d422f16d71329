"""Tests of deploy.planner."""
