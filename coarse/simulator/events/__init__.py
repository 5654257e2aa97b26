"""The engine: tasks whose flows share links, and the timeline that they give."""
