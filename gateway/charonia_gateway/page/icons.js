// Icons, as lines in a square of 24 by 24.

import { svg } from "./libraries/lit-html/lit-html.js";

const PATHS = {
  add: "M12 5v14M5 12h14",
  attach: "M20 11.500l-8.200 8.200a5 5 0 0 1-7.100-7.100l8.500-8.500a3.300 3.300 0 0 1 4.700 4.700l-8.500 8.500a1.700 1.700 0 0 1-2.400-2.400l7.800-7.800",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h10v11H9zM5 15V4h10",
  down: "M12 5v14M6 13l6 6 6-6",
  edit: "M4 20l1-4.500L16.500 4l3.500 3.500L8.500 19z",
  export: "M12 4v11M7.500 10.500L12 15l4.500-4.500M5 20h14",
  import: "M12 15V4M7.500 8.500L12 4l4.500 4.500M5 20h14",
  left: "M14.500 6l-6 6 6 6",
  menu: "M4 7h16M4 12h16M4 17h16",
  play: "M5 6l6 6-6 6M13 6l6 6-6 6",
  remove: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  repeat: "M19 12a7 7 0 1 1-2.100-5M19 3v4.500h-4.500",
  right: "M9.500 6l6 6-6 6",
  search: "M11 5a6 6 0 1 0 0 12a6 6 0 0 0 0-12M15.500 15.500L20 20",
  send: "M12 19V6M6.500 11L12 5.500L17.500 11",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.500v5M9 14.500v5",
  stop: "M7 7h10v10H7z",
  tool: "M14.500 6.500a4 4 0 0 1 5-1l-3 3 .5 2 2 .5 3-3a4 4 0 0 1-5.500 4.500L9 20a2 2 0 0 1-4-4l7.500-7a4 4 0 0 1 2-2.500z",
};

export const icon = (name) => svg`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]}></path></svg>`;
