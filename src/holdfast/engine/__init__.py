"""The engine: it moves invocations by the contracts of the layers below and never knows which store it works on."""
