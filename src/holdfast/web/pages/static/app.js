// Actions, keys, live updates and relative times. Every page can be read without it.
import { actions } from "./actions.js";
import { keys } from "./keys.js";
import { live } from "./live.js";
import { search } from "./search.js";
import { streams } from "./stream.js";
import { tables } from "./tables.js";
import { times } from "./times.js";

document.body.classList.add("has-script");
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
actions();
keys();
search();
streams();
tables();
times();
live();
