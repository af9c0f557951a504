// The page's texts, in English and Chinese (languages.json).

import { preferences } from "./preferences.js";

const LANGUAGES = await (await fetch(new URL("languages.json", import.meta.url))).json();

export const language = () => {
  if (preferences.language in LANGUAGES) return preferences.language;
  return navigator.languages.map((tag) => tag.slice(0, 2)).find((tag) => tag in LANGUAGES) ?? "en";
};

/** The text `name` in the user's language, with the values in place of {0}, {1} and so on. A text with plural forms has
 * the form of its first value. */
export function text(name, ...values) {
  const found = LANGUAGES[language()][name];
  const form = found.other ? (found[new Intl.PluralRules(language()).select(values[0])] ?? found.other) : found;
  return typeof form === "string" ? form.replace(/\{(\d)\}/g, (_, index) => values[index]) : form;
}
