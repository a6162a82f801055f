// Live updates and actions. Every page can be read without it.
