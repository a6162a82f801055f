// Actions, keys, live updates and relative times. Every page can be read without it.
import { actions } from "./actions.js";
import { keys } from "./keys.js";
import { live } from "./live.js";
import { times } from "./times.js";

document.body.classList.add("has-script");
actions();
keys();
times();
live();
