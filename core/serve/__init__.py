"""The server: an API process that speaks OpenAI's protocol, and an engine process that computes.

The API process tokenizes, renders chat templates, decodes, matches stop strings and writes JSON; it never imports
torch. The engine process owns the Engine. Between them run frames of messages (`wire`) over a socket pair.
"""
