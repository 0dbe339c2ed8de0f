"""Guild under models and trainers that other libraries define, one module each.

Nothing is imported here; `import guild.integrations.transformers` imports one of them.
"""
