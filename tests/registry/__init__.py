"""The registry: what hub, gateway, node and coordinator tell each other."""
